from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('outbox', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Finding',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('output', models.TextField()),
                ('run', models.CharField(max_length=63)),
                ('rule', models.CharField(max_length=255)),
                ('group', models.CharField(blank=True, db_column='consumer_group', max_length=127)),
                ('finding_class', models.CharField(db_column='class', max_length=15, verbose_name='class')),
                ('severity', models.CharField(max_length=15)),
                ('key', models.TextField()),
                ('detail', models.TextField(blank=True)),
                ('at', models.DateTimeField(null=True)),
                ('first_seen', models.DateTimeField(null=True)),
                ('message_id', models.CharField(blank=True, max_length=63)),
                ('transaction_id', models.CharField(blank=True, max_length=63)),
                ('row', models.TextField(blank=True)),
                ('body', models.TextField(blank=True)),
            ],
            options={
                'verbose_name': 'reconciliation finding',
                'db_table': 'outbox_finding',
            },
        ),
    ]
