from django.db import migrations, models

from outbox.contrib.django.database.columns import compare_as_postgresql


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='UniqueKey',
            fields=[
                ('pk', models.CompositePrimaryKey('topic', 'unique_key', blank=True, editable=False, primary_key=True, serialize=False)),
                ('topic', models.CharField(max_length=127)),
                ('unique_key', models.CharField(max_length=255)),
                ('message_id', models.UUIDField()),
                ('until', models.DateTimeField()),
            ],
            options={
                'db_table': 'outbox_unique',
                'indexes': [models.Index(fields=['until'], name='outbox_unique_until')],
            },
        ),
        # MariaDB ends a transaction at each of these statements, and Django refuses them in one.
        migrations.RunPython(compare_as_postgresql('outbox_unique'), migrations.RunPython.noop, atomic=False),
    ]
