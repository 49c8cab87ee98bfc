from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='SubjectKey',
            fields=[
                ('key_id', models.UUIDField(primary_key=True, serialize=False)),
                ('subject', models.CharField(max_length=255, null=True, unique=True)),
                ('wrapped', models.BinaryField(null=True)),
                ('created_at', models.DateTimeField()),
                ('deleted_at', models.DateTimeField(null=True)),
            ],
            options={
                'db_table': 'outbox_subject_key',
                'managed': False,
            },
        ),
    ]
